"""verl's VeOmni engine, on real gloo ranks of a CPU."""
