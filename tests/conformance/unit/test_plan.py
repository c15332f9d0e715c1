import pytest
from jax_conformance import plan
from jax_conformance.plan import Target, TestFile


def test_no_names_are_all_files() -> None:
    assert plan.chosen([]) == plan.FILES


def test_names_are_taken_with_and_without_their_ending_in_the_order_given() -> None:
    assert [file.name for file in plan.chosen(["pjit_test.py", "array"])] == ["pjit", "array"]


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(plan.UnknownFileError, match=r"pjitt is not a file of the plan; it has array, multi_device, "):
        plan.chosen(["array", "pjitt"])


def test_several_slices_are_for_files_that_make_their_own_meshes() -> None:
    own, other = TestFile("own", makes_own_meshes=True), TestFile("other")
    assert plan.steps([other, own], list(Target)) == [
        (other, Target.PLAIN),
        (other, Target.ONE_SLICE),
        (own, Target.PLAIN),
        (own, Target.ONE_SLICE),
        (own, Target.TWO_SLICES),
    ]
    assert plan.steps([other, own], [Target.TWO_SLICES]) == [(own, Target.TWO_SLICES)]


def test_no_file_is_left_out_and_has_run() -> None:
    assert not plan.LEFT_OUT.keys() & {file.name for file in plan.FILES}


def test_a_target_says_its_shape() -> None:
    assert [target.shape for target in Target] == [None, (1, 4, 2), (2, 2, 2)]
