"""Searches the choices of a plan: proposes candidates, ranks them by rising fidelity, keeps the best.

Owns the space of choices, the ladder that scores them and the race against the hand and reference plans. Refuses to
know how a score comes about: that is an `Evaluator`, today the simulator. Called by the `tuner` command.
"""
