"""Metrics: functions of statistics."""

from calibrant.metrics.calibration import expected_calibration_error

__all__ = ["expected_calibration_error"]
