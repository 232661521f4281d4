"""Analysis: probes and profiles over the activations of a lake."""
