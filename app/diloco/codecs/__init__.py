"""What crosses the network as bytes: one file for the interface, one for each family of codecs, two for kernels."""
