"""Error codes that an example of files cannot produce, and the test file that produces each.

Causes: exploding definitions, a full disk, no compiler, a broken package, ranks that diverge; and
failures of static proofs, which only a defect of schedlang causes.
"""

from __future__ import annotations

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    "S009": "test_extension.py",
    "S116": "test_hostile.py",
    "S614": "test_stage_units.py",
    "S651": "test_agreement.py",
    "S654": "test_agreement.py",
    "S657": "test_slices.py",
    "S663": "test_uneven_use.py",
    "S669": "test_statistics.py",
    "S711": "test_static.py",
    "S712": "test_static.py",
    "S713": "test_static.py",
    "S714": "test_static.py",
    "S715": "test_static.py",
    "S716": "test_static.py",
    "S821": "test_kernel_injection.py",
    "S831": "test_fuse.py",
    "S832": "test_fuse.py",
    "S834": "test_fuse.py",
    "S846": "test_memory_budget.py",
    "S850": "test_offloaded_state.py",
    "S871": "test_rope.py",
    "S877": "test_attention_backends.py",
    "S878": "test_attention_backends.py",
    "S909": "test_lsp.py",
    "W703": "test_declined_calls.py",
    "W704": "test_gather_rows.py",
}
