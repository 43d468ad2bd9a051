# SPDX-License-Identifier: Apache-2.0
"""Settings that several of the fixes read."""
