"""Sequences in time: scheduler, layer pipeline, sampling."""
