"""Every piece of the objective against an independent float64 implementation, written here from the papers' formulas.

`reference.py` and `densities.py` hold the formulas and import nothing of the project. `*_checks.py` are plain functions
that raise AssertionError: the tests call them, and `test_mutations.py` calls them on the broken variants of
`mutation_list.py`, which they must catch. That k × accumulation = k × batch and N ranks = 1 rank is shown on whole runs
in `tests/integration/test_training.py`.
"""
