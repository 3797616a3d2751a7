"""Conformance: every causal language model that the installed transformers knows, small and random, against `generate`.

`python -m tests.conformance` (or ``make conformance``) builds a checkpoint of each type, runs it in every way that
`tests.conformance.compare.WAYS` names, and writes what came of it to ``sweeps/results/conformance.json``, from which
``docs/models.md`` is made.
"""
