"""The decision core: click model, precision, planning, policies, estimators. numpy only."""
