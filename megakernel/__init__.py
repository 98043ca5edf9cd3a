"""The language that simulator, runtime and tuner share: what a decode step is, and how it is put on a chip.

Owns every noun that crosses a program's border: models, chips, task graphs, tables, plans, timelines.
Refuses torch, CUDA, SimPy, Optuna, clocks, printing and the environment; tests/unit/test_imports.py checks.
"""
