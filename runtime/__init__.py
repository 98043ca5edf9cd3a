"""Executes task tables: the only program that knows torch and CUDA.

Owns tensors, devices and the models' weights. Refuses to plan or to simulate: plans come from the tuner as
files. Simulator and runtime never import each other.
"""
