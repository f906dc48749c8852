"""The conformance kit: what a platform must do, as tests that anyone can run against an installed platform.

`isthmus platforms certify NAME`, or the same as a pytest run of one's own:
`pytest -p isthmus.conformance.plugin --pyargs isthmus.conformance --isthmus-platform NAME --isthmus-report out.json`.
One file `test_<area>.py` an area; `areas` says which areas make which level.
"""
