"""The operating system: files written whole or not at all, signals, TOML, a user's plugins, and the checker of JSON schemas.

Imports nothing of lbq but `errors`. Everything else stands on it.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
