"""What looking inside adds to the journey in `refvl.pipeline`, which is read without it.

watch.py         attention weights and hidden states of a run: `trace(..., attentions=True, hidden_states=True)`
report.py        the table that a trace prints
comparison.py    where two runs part: `refvl.compare`; recording.py records transformers' own run for it
boxes.py         boxes in answers, in pixels of the picture
costs.py         what a model costs before it is loaded; arithmetic.py counts its operations
shallow.py       a random checkpoint as wide as a release, with few layers
stale.py         what a graph computes when one of its buffers is not refilled
releases.py      positions as other releases compute them
"""
