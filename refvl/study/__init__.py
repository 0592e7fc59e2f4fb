"""Tools that inspect a run. `refvl.pipeline` can be read without them.

watch.py         attention weights and hidden states of a run: `trace(..., attentions=True, hidden_states=True)`
report.py        the table that a trace prints
comparison.py    where two runs first differ: `refvl.compare`; recording.py records a run of transformers for it
boxes.py         boxes in answers, in pixels of the image
costs.py         the costs of a model, computed before it is loaded
follow.py        the functions that a request calls, in call order; source.py parses their files
shallow.py       a random checkpoint with the widths of a release and few layers
stages.py        functions that you can write yourself; interventions.py replaces their results
releases.py      positions as released software computes them
"""
