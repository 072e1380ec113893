"""The sitecustomize of a job of `capd run` or CAPD_WATCH=1, which Python imports at its start before the job's own.

It lets `_capd_startup` wait for torch and then removes itself. Then it imports the job's own sitecustomize as if
this file had never existed: found, missing or failing, it looks as without capd.

Every Python that the job starts imports this file, including other versions and other tools' interpreters. So the
file uses only syntax that all of them can read.
"""

import os
import sys

try:
    if sys.version_info >= (3, 10) and os.environ.get("CAPD_ENDPOINT", "").strip().lower() not in ("", "off"):
        import _capd_startup

        _capd_startup.begin()
except Exception as error:
    if os.environ.get("CAPD_LOG", "").lower() == "debug":
        sys.stderr.write("capd: start-up: %r\n" % (error,))

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if entry != _here]
sys.modules.pop("sitecustomize", None)

# This is the job's own. If there is none, `site` expects this error.
import sitecustomize
