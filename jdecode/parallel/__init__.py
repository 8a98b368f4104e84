"""Devices as a mesh, and which array axis lies along which mesh axis."""
