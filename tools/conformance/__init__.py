"""Conformance tests: every causal language model of the installed transformers, small and random, against `generate`.

`python -m tools.conformance` (or ``make conformance``) makes a checkpoint of each type, runs it in all ways of
`tools.conformance.compare.WAYS`, and writes the outcomes to ``sweeps/results/conformance.json``, from which
``docs/models.md`` is made.
"""
