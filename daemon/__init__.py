"""The daemon: command line, service, HTTP surface, chat, engine and model (see DESIGN in docs/)."""

if __name__ != "sluice.daemon":
    raise ImportError("import sluice.daemon, not daemon: a second copy of these modules would have unequal classes")
