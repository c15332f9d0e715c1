"""IFRT's protobuf values and what core's types make of them; the schema is that of jaxlib's IFRT proxy client."""
