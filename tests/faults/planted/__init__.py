"""The platform "planted" on the host's CPU: right in every part, so that one part can be made wrong."""
