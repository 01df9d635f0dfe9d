//! `millrace serve`.

use std::io::{IsTerminal, Write};

use node::{Config, Machine, Ready, Settings, Size, write_list};

use crate::args::ServeArgs;
use crate::failure::Failure;
use crate::output::thousands;

/// Serves until a signal says stop.
pub fn run(args: ServeArgs) -> Result<(), Failure> {
    let yes = |flag: bool| flag.then_some(true);
    let flags = Settings {
        data: args.data,
        read_only: yes(args.read_only),
        durability: args.durability,
        adopt: yes(args.adopt),
        listen: args.listen,
        cores: args.cores,
        memory: args.memory,
        poll: args.poll,
        io: args.io,
        secondary: yes(args.secondary),
        salvage: yes(args.salvage),
        allow_remote: yes(args.allow_remote),
        metrics: args.metrics,
        log_level: args.log_level,
        log_format: args.log_format,
        log_file: args.log_file,
        requirepass: None,
        password_file: args.password_file,
    };
    let settings = match &args.config {
        Some(file) => flags.or(Settings::from_file(file)?),
        None => flags,
    };
    let machine = Machine::look();
    let mut config = Config::new(settings, &machine)?;
    config.file = args.config;
    let about = config.clone();
    node::serve(config, machine, move |ready| say_ready(&about, ready))?;
    Ok(())
}

/// One line that says what is served where, and on a terminal how to try it.
fn say_ready(config: &Config, ready: &Ready) {
    let mut out = std::io::stdout().lock();
    let mut text = format!("{}\n", ready_line(config, ready));
    if let Some(addr) = ready.metrics {
        text.push_str(&format!("metrics: http://{addr}/metrics\n"));
    }
    if out.is_terminal() {
        let port = match ready.listen.port() {
            6379 => String::new(),
            port => format!("-p {port} "),
        };
        text.push_str(&format!("try: redis-cli {port}MR.RANGE - + LIMIT 5\n"));
    }
    // Nobody may be listening to standard output; clients still are.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn ready_line(config: &Config, ready: &Ready) -> String {
    let cores = match config.processors.len() {
        1 => "1 core".to_owned(),
        cores => format!("{cores} cores"),
    };
    let about = if ready.counted { "" } else { "about " };
    let how = match config.read_only {
        true => "read-only".to_owned(),
        false => format!("durability {}", config.durability),
    };
    format!(
        "millrace {} serves {} ({about}{} keys, {how}) on {}: {cores} ({}), {}, {} of memory",
        env!("CARGO_PKG_VERSION"),
        config.data.display(),
        thousands(ready.keys),
        ready.listen,
        write_list(&config.processors),
        ready.driver,
        Size(config.memory_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_served_where_and_with_what() {
        let machine = Machine::look();
        let settings = Settings {
            data: Some("/srv/db".into()),
            read_only: Some(true),
            cores: Some("1".parse().unwrap()),
            memory: Some(Size(1 << 30)),
            ..Settings::default()
        };
        let config = Config::new(settings, &machine).unwrap();
        let ready = Ready {
            listen: config.listen,
            metrics: None,
            driver: "io_uring",
            keys: 4_000_000,
            counted: false,
        };
        let line = ready_line(&config, &ready);
        let rest = line.split_once(" serves ").unwrap().1;
        let cpu = config.processors[0];
        assert_eq!(
            rest,
            format!(
                "/srv/db (about 4,000,000 keys, read-only) on 127.0.0.1:6379: 1 core ({cpu}), \
                 io_uring, 1 GiB of memory"
            )
        );
    }
}
