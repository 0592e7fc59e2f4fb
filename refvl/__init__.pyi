from refvl import attention as attention
from refvl import checkpoints as checkpoints
from refvl import encoders as encoders
from refvl import families as families
from refvl import graphs as graphs
from refvl import language as language
from refvl import merge as merge
from refvl import pipeline as pipeline
from refvl import pixels as pixels
from refvl import positions as positions
from refvl import processors as processors
from refvl import serving as serving
from refvl import study as study
from refvl import tools as tools
from refvl import viz as viz
from refvl.loading import load as load
from refvl.model import VLM as VLM
from refvl.paths import data as data
from refvl.serving import adapters as adapters
from refvl.serving import export as export
from refvl.serving import parallel as parallel
from refvl.study import boxes as boxes
from refvl.study import comparison as comparison
from refvl.study import watch as watch
from refvl.study.comparison import compare as compare
from refvl.study.report import Trace as Trace

__version__: str
