"""A short run of ``benchmarks/soak.py``: it checks itself what is left over."""

from pathlib import Path

from benchmarks.soak import soak


def test_nothing_is_left_over(runner: str, text_model: Path) -> None:
    settings = {"model": str(text_model), "model_runner": runner, "async_scheduling": runner == "v2"}
    report = soak(240, num_reports=2, mean_steps=40, event_share=0.03, load_failures=0.5, **settings)
    assert report["requests"] == sum(report["ends"].values()) == 240
    assert report["ends"].keys() <= {"abort", "length", "stop"}
    happened = ("restarts", "preemptions", "loads", "failed_loads", "reload_weights", "sleep", "reset_prefix_cache")
    assert min(report[name] for name in happened) > 0
