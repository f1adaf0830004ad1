// Search runs in a worker, and browsers refuse to start workers on pages opened from disk (file://).
// There, this class runs the worker's script in a hidden frame instead, with the interface of Worker.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    inside.document.open();
    inside.document.write("<body></body>");
    inside.document.close();
    inside.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    };
    const script = inside.document.createElement("script");
    script.src = url;
    this.loaded = new Promise((resolve) => (script.onload = resolve));
    inside.document.body.append(script);
  }

  async postMessage(data) {
    await this.loaded;
    const inside = this.frame.contentWindow;
    inside.dispatchEvent(new inside.MessageEvent("message", { data }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
