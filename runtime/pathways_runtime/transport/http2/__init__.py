"""The server's half of gRPC over HTTP/2, in batches.

``connection.ServerConnection`` speaks it without I/O: bytes in, events out; answers in, bytes out.
``server.Http2Server`` is its shell on an event loop; the other files are parts of the connection. It does what RFC 9113
and the gRPC HTTP/2 protocol ask of a server whose clients know that it speaks HTTP/2, without TLS and with uncompressed
messages only.
"""
