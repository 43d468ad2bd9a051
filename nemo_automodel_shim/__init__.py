# SPDX-License-Identifier: Apache-2.0
"""The fixes of ``patches/`` as importable code, in upstream's module layout; importable with torch alone.

Modules that a patch adds to upstream are the modules here, byte for byte below their header. ``install()`` puts the
same fixes into an unpatched release in the running process.
"""

from nemo_automodel_shim.installing import UnknownReleaseError, install, uninstall

__all__ = ["UnknownReleaseError", "install", "uninstall"]
