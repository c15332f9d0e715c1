"""What holds where nothing else is set. Imports nothing: the settings of a run begin with these, too."""

#: Silence after which a worker counts as lost.
HEARTBEAT_TIMEOUT_S = 8.0
#: Up to so many executors connect to the controller themselves; a message to or from each costs it microseconds.
RELAY_FANOUT = 32
