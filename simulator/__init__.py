"""A SimPy model of one persistent kernel on one chip, answering to measured data.

`simulate` runs an abstract `Program` (lists of records per SM); streaming programs (`stream.py`) and plan tables are
two front ends of that one model. See `memory.py` and `counters.py` for the physics, `sm.py` for the loop.
"""
