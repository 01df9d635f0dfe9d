import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Executes the commands of a test with a caching client: one line of JSON for each, [name, argument, ...], and one line for
 * its outcome, {"value": ...} or {"error": "..."}.
 */
public abstract class Driver {
  /** A read through the cache. */
  abstract Object get(String key) throws Exception;

  /** A read of several keys, through the cache if the client has one for it. */
  abstract Object mget(List<String> keys) throws Exception;

  abstract Object set(String key, String value) throws Exception;

  abstract Object del(String key) throws Exception;

  /** Commands that are sent without waiting in between. */
  abstract Object pipeline(List<List<String>> commands) throws Exception;

  /** Watches keys on a connection that `exec` then uses. */
  abstract Object watch(List<String> keys) throws Exception;

  /** The replies of a transaction, or null if a watched key was written. */
  abstract Object exec(List<List<String>> commands) throws Exception;

  @SuppressWarnings("unchecked")
  private Object execute(List<Object> line) throws Exception {
    List<Object> rest = line.subList(1, line.size());
    List<String> words = (List<String>) (List<?>) rest;
    List<List<String>> commands = (List<List<String>>) (List<?>) rest;
    switch ((String) line.get(0)) {
      case "get": return get(words.get(0));
      case "mget": return mget(words);
      case "set": return set(words.get(0), words.get(1));
      case "del": return del(words.get(0));
      case "pipeline": return pipeline(commands);
      case "watch": return watch(words);
      case "exec": return exec(commands);
      default: throw new IllegalArgumentException("unknown: " + line);
    }
  }

  void run() throws Exception {
    Gson gson = new GsonBuilder().serializeNulls().create();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    System.out.println("{\"value\":\"ready\"}");
    for (String line; (line = lines.readLine()) != null; ) {
      Map<String, Object> outcome = new LinkedHashMap<>();
      try {
        outcome.put("value", execute(gson.<List<Object>>fromJson(line, List.class)));
      } catch (Exception error) {
        outcome.put("error", String.valueOf(error));
      }
      System.out.println(gson.toJson(outcome));
    }
    System.exit(0);
  }
}
