"""SIS on verl's own Megatron engine, with megatron-core as released, on gloo ranks."""
