"""Eyas: EAGLE-3 speculative decoding that works on the first try and says honestly whether it pays."""
