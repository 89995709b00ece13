//! Every span, metric and attribute name; the OTLP exporter. Knows no models.
