"""The formats that a run can be exported to, one module each."""
