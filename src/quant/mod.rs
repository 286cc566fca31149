//! Quantised weight formats, de-quantised on load.
