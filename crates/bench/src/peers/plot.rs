//! Draws latency against throughput, as SVG.

use std::fmt::Write as _;

/// The contents of a plot.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// The title.
    pub title: String,
    /// The programs.
    pub curves: Vec<Curve>,
    /// The disk's maximum of operations per second: a vertical line.
    pub ceiling: Option<f64>,
    /// The name of that line.
    pub ceiling_label: String,
}

/// One program's points.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    /// Its name.
    pub label: String,
    /// Operations per second and p99 in microseconds, in the order of the loads.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 500.0;
/// The corner and the ends of the axes.
const LEFT: f64 = 80.0;
const RIGHT: f64 = WIDTH - 30.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = HEIGHT - 60.0;
/// Colours that colour-blind readers can tell apart.
const COLOURS: [&str; 2] = ["#0072b2", "#d55e00"];

/// Both axes: throughput linear from zero, latency logarithmic over whole decades.
struct Axes {
    ops_max: f64,
    ops_step: f64,
    /// Powers of ten of the least and the largest latency in microseconds.
    from: i32,
    to: i32,
}

impl Axes {
    fn new(chart: &Chart) -> Axes {
        let points = || chart.curves.iter().flat_map(|curve| &curve.points);
        let most = points().map(|point| point.0).chain(chart.ceiling).fold(1.0, f64::max);
        // At most ten steps of 1, 2 or 5 times a power of ten.
        let power = 10f64.powf((most / 10.0).log10().floor());
        let ops_step = [1.0, 2.0, 5.0, 10.0]
            .map(|times| times * power)
            .into_iter()
            .find(|step| most / step <= 10.0)
            .unwrap_or(power * 10.0);
        let decades = |us: f64| us.max(1.0).log10();
        let least = points().map(|point| decades(point.1)).fold(f64::INFINITY, f64::min);
        let largest = points().map(|point| decades(point.1)).fold(0.0, f64::max);
        let from = if least.is_finite() { least.floor() as i32 } else { 0 };
        let to = (largest.ceil() as i32).max(from + 1);
        Axes { ops_max: (most / ops_step).ceil() * ops_step, ops_step, from, to }
    }

    fn x(&self, ops: f64) -> f64 {
        LEFT + ops / self.ops_max * (RIGHT - LEFT)
    }

    fn y(&self, us: f64) -> f64 {
        let part = (us.max(1.0).log10() - f64::from(self.from)) / f64::from(self.to - self.from);
        BOTTOM - part * (BOTTOM - TOP)
    }
}

/// The plot as SVG.
pub fn svg(chart: &Chart) -> String {
    let axes = Axes::new(chart);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    text(&mut out, (LEFT, 28.0), "start", "font-size=\"16\"", &chart.title);
    scales(&mut out, &axes);
    if let Some(ceiling) = chart.ceiling {
        let x = axes.x(ceiling);
        let _ = writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{BOTTOM}\" stroke=\"#444\" \
             stroke-width=\"2\" stroke-dasharray=\"8 5\"/>"
        );
    }
    for (curve, colour) in chart.curves.iter().zip(COLOURS.iter().cycle()) {
        draw(&mut out, &axes, curve, colour);
    }
    legend(&mut out, chart);
    out.push_str("</svg>\n");
    out
}

/// The axes with their numbers and units.
fn scales(out: &mut String, axes: &Axes) {
    let line = |out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str| {
        let _ = writeln!(
            out,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        );
    };
    let steps = (axes.ops_max / axes.ops_step).round() as u32;
    for step in 0..=steps {
        let ops = f64::from(step) * axes.ops_step;
        let x = axes.x(ops);
        line(out, (x, TOP), (x, BOTTOM), "#ddd");
        text(out, (x, BOTTOM + 18.0), "middle", "", &thousands(ops));
    }
    for power in axes.from..=axes.to {
        let us = 10f64.powi(power);
        line(out, (LEFT, axes.y(us)), (RIGHT, axes.y(us)), "#ddd");
        text(out, (LEFT - 8.0, axes.y(us) + 4.0), "end", "", &duration(us));
    }
    line(out, (LEFT, BOTTOM), (RIGHT, BOTTOM), "black");
    line(out, (LEFT, TOP), (LEFT, BOTTOM), "black");
    let middle = f64::midpoint(LEFT, RIGHT);
    text(out, (middle, HEIGHT - 16.0), "middle", "", "operations per second");
    let place = format!("transform=\"rotate(-90 18 {0})\"", f64::midpoint(TOP, BOTTOM));
    text(out, (18.0, f64::midpoint(TOP, BOTTOM)), "middle", &place, "p99 latency");
}

/// A line through a program's points, a mark at each.
fn draw(out: &mut String, axes: &Axes, curve: &Curve, colour: &str) {
    let places: Vec<_> =
        curve.points.iter().map(|point| (axes.x(point.0), axes.y(point.1))).collect();
    let line: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
        line.join(" ")
    );
    for ((x, y), (ops, us)) in places.iter().zip(&curve.points) {
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"><title>{}: {}/s, p99 {}</title></circle>",
            escaped(&curve.label),
            thousands(*ops),
            duration(*us)
        );
    }
}

/// The legend, at the top left, clear of the curves.
fn legend(out: &mut String, chart: &Chart) {
    let mut y = TOP + 18.0;
    let mut entry = |out: &mut String, colour: &str, dashes: &str, label: &str| {
        let _ = writeln!(
            out,
            "<line x1=\"{}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>",
            LEFT + 12.0,
            LEFT + 42.0
        );
        text(out, (LEFT + 50.0, y + 4.0), "start", "", label);
        y += 20.0;
    };
    for (curve, colour) in chart.curves.iter().zip(COLOURS.iter().cycle()) {
        entry(out, colour, "", &curve.label);
    }
    if let Some(ceiling) = chart.ceiling {
        let label = format!("{}, {}/s", chart.ceiling_label, thousands(ceiling));
        entry(out, "#444", " stroke-dasharray=\"8 5\"", &label);
    }
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, more: &str, words: &str) {
    let words = escaped(words);
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{words}</text>"
    );
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// `20 k` for 20,000.
fn thousands(ops: f64) -> String {
    match ops {
        ops if ops >= 1000.0 && (ops / 1000.0).fract() == 0.0 => format!("{:.0} k", ops / 1000.0),
        ops if ops >= 1000.0 => format!("{:.1} k", ops / 1000.0),
        ops => format!("{ops:.0}"),
    }
}

fn duration(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", round(us / 1e6)),
        us if us >= 1e3 => format!("{} ms", round(us / 1e3)),
        us => format!("{} us", round(us)),
    }
}

/// Rounds to three digits or one decimal.
fn round(number: f64) -> f64 {
    match number {
        number if number >= 100.0 => number.round(),
        number => (number * 10.0).round() / 10.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        let curve = |label: &str, points: &[(f64, f64)]| Curve {
            label: label.to_owned(),
            points: points.to_vec(),
        };
        Chart {
            title: "a < b".to_owned(),
            curves: vec![
                curve("ours", &[(10_000.0, 200.0), (40_000.0, 3_000.0)]),
                curve("theirs", &[(5_000.0, 900.0), (20_000.0, 50_000.0)]),
            ],
            ceiling: Some(72_000.0),
            ceiling_label: "the disk".to_owned(),
        }
    }

    #[test]
    fn every_point_is_drawn_at_its_coordinates() {
        let (axes, picture) = (Axes::new(&chart()), svg(&chart()));
        assert_eq!((axes.ops_max, axes.ops_step, axes.from, axes.to), (80_000.0, 10_000.0, 2, 5));
        assert_eq!((axes.x(0.0), axes.x(80_000.0)), (LEFT, RIGHT));
        assert_eq!((axes.y(100.0), axes.y(100_000.0)), (BOTTOM, TOP));
        assert_eq!(picture.matches("<circle").count(), 4);
        for point in chart().curves.iter().flat_map(|curve| &curve.points) {
            let place = format!("cx=\"{:.1}\" cy=\"{:.1}\"", axes.x(point.0), axes.y(point.1));
            assert!(picture.contains(&place), "{point:?} at {place}");
        }
        assert!(picture.contains("<title>theirs: 20 k/s, p99 50 ms</title>"));
    }

    #[test]
    fn axes_have_units_and_lines_have_names() {
        let picture = svg(&chart());
        for words in [">operations per second<", ">p99 latency<", ">ours<", ">theirs<"] {
            assert!(picture.contains(words), "{words}");
        }
        assert!(picture.contains(">the disk, 72 k/s<") && picture.contains(">a &lt; b<"));
        assert!(picture.contains(">10 ms<") && picture.contains(">40 k<"));
        let dashed = format!("<line x1=\"{0:.1}\"", Axes::new(&chart()).x(72_000.0));
        assert!(picture.contains(&dashed), "the ceiling is at its throughput");
    }

    #[test]
    fn a_chart_without_points_is_valid_svg() {
        let picture = svg(&Chart::default());
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
    }
}
