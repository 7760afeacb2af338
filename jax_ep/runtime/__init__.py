"""The runtime of groups: native groups, the meeting of processes, heartbeats and failures."""
