"""Speculative decoding with a trained head: sampling, verification, cache, engine, measurement."""
