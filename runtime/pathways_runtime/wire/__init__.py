"""Messages between processes, and conversions between IFRT's protobufs and core's values."""
