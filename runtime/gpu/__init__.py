"""Runs task tables on a card: specialise, compile, allocate, launch, trace, measure, explain a stop."""
