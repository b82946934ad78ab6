"""Places the models of a cascade on the GPUs of a cluster: Algorithm 3, the binary program, lower bounds."""
