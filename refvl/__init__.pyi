from refvl import adapters as adapters
from refvl import attention as attention
from refvl import boxes as boxes
from refvl import checkpoints as checkpoints
from refvl import comparison as comparison
from refvl import contracts as contracts
from refvl import encoders as encoders
from refvl import families as families
from refvl import graphs as graphs
from refvl import handover as handover
from refvl import language as language
from refvl import merge as merge
from refvl import parallel as parallel
from refvl import pipeline as pipeline
from refvl import pixels as pixels
from refvl import positions as positions
from refvl import processors as processors
from refvl import tools as tools
from refvl import viz as viz
from refvl import watch as watch
from refvl.comparison import compare as compare
from refvl.loading import load as load
from refvl.service import VLM as VLM
from refvl.trace import Trace as Trace

__version__: str
