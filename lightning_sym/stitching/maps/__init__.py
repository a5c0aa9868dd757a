"""The families of maps that can join two networks, from all matrices to the intertwiner group."""
