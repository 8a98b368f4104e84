"""Decoding: one state, one step, one loop on the device, and the drivers around it."""
