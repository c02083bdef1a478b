"""A stand-in that speaks as much of SGLang's Python interface as our engine uses, with a counter for a model.

Flags, finish reasons and answers are those in tests/sglang_facts.json, which sglang_facts.py reads from the real
package. What it makes of a request: ids 10, 11, 12, ..., one from the prefill, then blocks of 1 to its window.
"""
