//! Plots of a training run as PNG.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::register_font;

use crate::lm::{Step, shares};

type Fallible = Result<(), Box<dyn Error + Send + Sync>>;

const SIZE: (u32, u32) = (960, 600);
/// Steps that one point of the expert plot averages over.
const WINDOW: usize = 10;

/// Text needs a font, and not every machine has one: the plots bring theirs.
fn font() -> Fallible {
    register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| "the bundled font is damaged")?;
    Ok(())
}

/// Loss by step, with the twin's values at the steps it was computed.
pub fn loss(path: &Path, steps: &[Step], bound: Option<f64>) -> Fallible {
    font()?;
    let root = BitMapBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let top = steps.iter().map(|s| s.loss).fold(bound.unwrap_or(0.0), f64::max) * 1.05;
    let mut chart = ChartBuilder::on(&root)
        .caption("Loss", ("sans-serif", 24))
        .margin(15)
        .x_label_area_size(45)
        .y_label_area_size(60)
        .build_cartesian_2d(0..steps.len().max(1), 0.0..top)?;
    chart.configure_mesh().x_desc("step").y_desc("cross-entropy of the next byte, nats").draw()?;
    chart
        .draw_series(LineSeries::new(steps.iter().map(|s| (s.step, s.loss)), BLUE.stroke_width(2)))?
        .label("over the ranks")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLUE.stroke_width(2)));
    // Enough points to see, few enough to see the line under them.
    let every = (steps.len() / 40).max(1);
    let twins = steps.iter().step_by(every).filter_map(|s| Some((s.step, s.twin.as_ref()?.loss)));
    chart
        .draw_series(twins.map(|at| Circle::new(at, 4, RED.stroke_width(1))))?
        .label("dense reference model, same weights")
        .legend(|(x, y)| Circle::new((x + 10, y), 4, RED.stroke_width(1)));
    if let Some(bound) = bound {
        chart
            .draw_series(LineSeries::new([(0, bound), (steps.len(), bound)], BLACK.mix(0.5)))?
            .label(format!("bound {bound}"))
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLACK.mix(0.5)));
    }
    let labels = SeriesLabelPosition::UpperRight;
    chart.configure_series_labels().position(labels).background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}

/// Share of the choices that each expert got, a panel a layer.
pub fn expert_load(path: &Path, steps: &[Step], bound: f64) -> Fallible {
    font()?;
    let layers = steps.first().map_or(0, |s| s.load.len());
    let root = BitMapBackend::new(path, (SIZE.0, SIZE.1 / 2 * layers.max(1) as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (layer, area) in root.split_evenly((layers.max(1), 1)).iter().enumerate().take(layers) {
        let points: Vec<(usize, Vec<f64>)> =
            steps.chunks(WINDOW).map(|c| (c[c.len() / 2].step, shares(c, layer))).collect();
        let experts = points.first().map_or(0, |(_, s)| s.len());
        let top = points.iter().flat_map(|(_, s)| s).fold(0.0, |a: f64, b| a.max(*b)) * 1.1;
        let mut chart = ChartBuilder::on(area)
            .caption(format!("Layer {layer}: share of choices by expert"), ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            // Room for the legend beside the lines.
            .build_cartesian_2d(0..(steps.len() * 9 / 8).max(1), 0.0..top.max(bound))?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc("share")
            .y_label_formatter(&|v| format!("{:.0} %", v * 100.0))
            .draw()?;
        for expert in 0..experts {
            let color = Palette99::pick(expert).stroke_width(2);
            chart
                .draw_series(LineSeries::new(points.iter().map(|(x, s)| (*x, s[expert])), color))?
                .label(format!("expert {expert}"))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color));
        }
        chart.draw_series(LineSeries::new([(0, bound), (steps.len(), bound)], BLACK.mix(0.5)))?;
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    }
    root.present()?;
    Ok(())
}
