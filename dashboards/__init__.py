"""Grafana dashboards as code, Prometheus rules, and a Prometheus that shows a running or a recorded run."""
