"""Where the models of a cascade lie on a cluster: Algorithm 3, the binary program, lower bounds."""
