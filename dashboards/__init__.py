"""Grafana dashboards as code, Prometheus rules, and a Prometheus server for running or recorded runs."""
