"""Entry points as records: filter, clashes, missing names."""

from __future__ import annotations

from mlx_spec.discovery import discover, distribution_version


def test_record_names_distribution_version_and_value(site):
    site.install("acme-spec", "acme", "X = 1", version="3.4")
    (record,) = discover(["acme"])
    assert (record.name, record.distribution, record.version, record.value) == (
        "acme",
        "acme-spec",
        "3.4",
        "acme_spec_plugin",
    )
    assert record.load().X == 1


def test_two_distributions_with_one_name_are_both_errors(site):
    site.install("acme-spec", "acme", "")
    site.install("other-spec", "acme", "")
    records = discover(["acme"])
    assert [r.distribution for r in records] == ["acme-spec", "other-spec"]
    for record in records:
        assert record.load is None
        assert "acme-spec" in str(record.error) and "other-spec" in str(record.error)


def test_a_leftover_copy_of_one_distribution_is_not_a_clash(site, tmp_path, monkeypatch):
    first = site.install("acme-spec", "acme", "", version="2.0")
    old = type(site)(tmp_path / "old")
    old.install("acme-spec", "acme", "", module=first, version="1.0")
    monkeypatch.syspath_prepend(str(old.folder))
    monkeypatch.syspath_prepend(str(site.folder))
    (record,) = discover(["acme"])
    assert record.error is None and record.version == "2.0"


def test_only_keeps_the_named_and_reports_the_unknown(site):
    site.install("acme-spec", "acme", "")
    site.install("other-spec", "other", "")
    found = {r.name: r.error for r in discover(["other", "nowhere"])}
    assert set(found) == {"other", "nowhere"}
    assert found["other"] is None
    assert "acme, " in str(found["nowhere"])


def test_an_empty_filter_loads_nothing(site):
    site.install("acme-spec", "acme", "")
    assert discover([]) == []


def test_a_distribution_without_metadata_is_still_listed(site):
    site.install("acme-spec", "acme", "")
    (site.folder / "acme_spec-1.0.dist-info" / "METADATA").unlink()
    (record,) = discover(["acme"])
    assert record.distribution


def test_version_of_an_absent_distribution_is_none():
    assert distribution_version("surely-not-installed-here") is None
    assert distribution_version("pluggy")
