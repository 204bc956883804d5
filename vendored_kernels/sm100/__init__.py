# SPDX-License-Identifier: Apache-2.0
"""The Blackwell kernel (sm_100a, sm_103a). Compiled, inspected and interpreted; never run on hardware."""
