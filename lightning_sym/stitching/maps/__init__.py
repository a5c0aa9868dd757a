"""Families of stitching maps, from all matrices to the intertwiner group."""
