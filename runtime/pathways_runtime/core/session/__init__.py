"""One client's session: its handles, arrays, executables, transfers and waits.

The front end feeds events (``core.session.events``) to ``SessionCore.handle`` and performs the instructions that it
returns (``core.session.instructions``). Requests and responses are IFRT's, as values of core types.
"""
