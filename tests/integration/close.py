"""When two runs of a script count as the same."""

import torch


def assert_weights_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within 1e-5 of the norm of all of them.

    Not one by one: a bias of keys has no gradient but rounding, as large as others under Adam.
    """
    assert found.keys() == expected.keys()
    apart, whole = 0.0, 0.0
    for name, value in found.items():
        other = expected[name].double()
        apart += float((value.double() - other).square().sum())
        whole += float(other.square().sum())
    assert apart**0.5 <= 1e-5 * whole**0.5
